"""Output: files, folders, images, recipes, traces and tables."""
