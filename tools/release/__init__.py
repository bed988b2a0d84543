"""Build the files of a release, and try them where nothing else is installed."""
