"""What a prompt becomes for an opened model: token ids, positions, and what is encoded together."""
