"""The program of a policy rank, on the device: it executes the driver's commands."""
