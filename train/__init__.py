"""Training recipes. Imports torch; never imported by the runtime."""
