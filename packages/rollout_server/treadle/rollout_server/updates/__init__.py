"""Moving new weights into the server: the transaction and the bytes."""
