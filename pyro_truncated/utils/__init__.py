"""What every floor uses: checks of arguments, programs run on the side, names of parameters."""
