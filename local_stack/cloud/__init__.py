"""The AWS services: moto in server mode, with the gaps that the recovery needs closed."""
