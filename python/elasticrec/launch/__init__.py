"""Starts the roles of a training as processes of this machine, and watches them."""
