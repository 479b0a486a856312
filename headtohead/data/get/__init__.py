"""h2h data get: where data sets are published, and how their files are downloaded and unpacked."""
