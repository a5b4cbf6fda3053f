"""A structure-aware fuzzer of the wire protocol, against live nodes on sockets."""
