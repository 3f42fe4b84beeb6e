"""The named methods: thin frozen dataclasses. A new one is a file here and a YAML in conf/strategy."""
