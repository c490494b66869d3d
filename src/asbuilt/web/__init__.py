"""The local page: a server on this machine alone, which answers with the JSON documents of the command line."""
