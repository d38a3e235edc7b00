"""Published ways to choose inducing inputs, for comparison."""
