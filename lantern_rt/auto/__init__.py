"""What a quality means, and which of the settings that draw its pictures is fastest on this host."""
