"""Codecs: encode rows as bytes for the wire, and decode them."""
