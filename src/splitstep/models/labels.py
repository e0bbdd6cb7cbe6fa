"""What data and losses agree on about labels; without torch, which reading data does not need."""

IGNORED = -100  # the label that no loss counts, as in transformers
