"""The version of this package, which its metadata is built from, too."""

VERSION = "0.1.0"
