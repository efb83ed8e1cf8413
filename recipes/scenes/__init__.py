"""The default bundle: rendered scenes, and every step that makes it."""
