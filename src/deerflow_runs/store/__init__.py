"""The stores: the tables, their statements and the connections to SQLite and PostgreSQL."""
