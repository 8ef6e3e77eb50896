"""SHARDCAST's command line: roles on HTTP nodes, with stores on disk and keys in files."""
