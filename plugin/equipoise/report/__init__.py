"""For people: what a run would take or took, as tables and pictures."""
