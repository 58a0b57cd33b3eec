"""gRPC and protobuf: decode, call the replica, encode."""
