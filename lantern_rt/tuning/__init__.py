"""Finding the fastest way to decode on this host: costs, acceptance, trees, relaxation, and what was found."""
