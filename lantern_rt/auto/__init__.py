"""What decoding takes of this host."""
