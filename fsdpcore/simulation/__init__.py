"""A model of a network and of its load, for jobs in virtual time: nothing here moves a byte."""
