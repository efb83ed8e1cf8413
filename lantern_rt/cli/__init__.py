"""The program `lantern-rt`: a file a command."""
