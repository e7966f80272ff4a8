"""The sandbox: runs programs written by a model without giving them access to the machine."""
