"""What only a GPU can tell: copies, idle gaps, utilisation, patterns, and the tuner on a real step."""
