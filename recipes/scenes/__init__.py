"""Recipe of the default bundle `scenes`: it renders training images, trains the models and writes the bundle."""
