"""Reads Pyro programs: discrete sites, supports, and log joints of states."""
