"""Measuring methods on this host: what they give, what they cost, and which is fastest."""
