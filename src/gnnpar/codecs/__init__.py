"""What goes on the wire: how rows become bytes and bytes rows."""
