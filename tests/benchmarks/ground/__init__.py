"""Of what the proving ground is made of."""
