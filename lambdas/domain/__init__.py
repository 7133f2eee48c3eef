"""Pure decisions of the recovery: no boto3, no clock, no environment. Time and facts are passed in."""
