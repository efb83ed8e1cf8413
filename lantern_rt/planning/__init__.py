"""What is known of a host and a model, and the method that follows from it."""
