"""Pictures and the verdict."""
