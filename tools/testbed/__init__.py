"""A test bed: N devices on one Linux machine, each with a network, a processor share and a pace."""
