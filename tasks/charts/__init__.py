"""Charts of results: one specification each, drawn as a PNG for papers and by the page itself for readers."""
