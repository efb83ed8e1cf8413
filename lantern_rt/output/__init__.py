"""What leaves the program: files, folders, pictures and charts."""
