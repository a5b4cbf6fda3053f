"""The protocol between nodes: messages, codec, framing, handshake. No I/O."""
