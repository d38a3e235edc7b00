"""What all folders use: argument checks, isolated runs, names of parameters."""
