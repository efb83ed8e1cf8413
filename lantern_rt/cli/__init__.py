"""The command-line program `lantern-rt`, with one module per command."""
