"""What leaves the program: files, folders, pictures, traces and charts."""
