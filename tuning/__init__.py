"""How block sizes are chosen and where the choice is kept."""
