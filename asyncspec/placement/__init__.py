"""Which device holds which layers: the model of costs, and the search for the best placement."""
