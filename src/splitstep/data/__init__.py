"""Published file formats to batches: files, examples, vocabularies, and which examples make an update."""
