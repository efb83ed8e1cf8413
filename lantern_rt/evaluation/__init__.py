"""What decoding methods do to images: figures with intervals, and a report. Behind `lantern-rt eval`."""
