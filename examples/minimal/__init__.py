"""RL from scratch with nothing but ``equipoise`` and Hugging Face: a trainer of 200 lines (``train.py``)."""
