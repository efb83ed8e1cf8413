"""What decoding methods do to pictures: figures with intervals, and a report. Behind `lantern-rt eval`."""
