"""The words asyncspec's nodes speak: messages, codec, framing, handshake. No I/O."""
