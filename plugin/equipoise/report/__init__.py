"""Tables, pictures and simulations for people."""
