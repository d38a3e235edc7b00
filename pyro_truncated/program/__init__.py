"""Reading a Pyro program: its discrete sites, its supports, and the log joints of many states at once."""
