-- A state file as version 2 of the layout was written: a returned lease and an active one.
BEGIN TRANSACTION;
CREATE TABLE rack (name TEXT NOT NULL);
INSERT INTO rack VALUES('demo');
CREATE TABLE record (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO record VALUES('function/alpha/nvme0','{"record":"function","function":"alpha/nvme0","epoch":2,"state":{"state":"lent","lease":2}}');
INSERT INTO record VALUES('host/alpha','{"record":"host","host":"alpha","incarnation":1760000000000000000,"address":"/run/rackbus/demo/alpha/link.sock"}');
INSERT INTO record VALUES('host/beta','{"record":"host","host":"beta","incarnation":1760000000000000000,"address":"/run/rackbus/demo/beta/link.sock"}');
INSERT INTO record VALUES('lease/1','{"record":"lease","lease":1,"function":"alpha/nvme0","epoch":1,"borrower":"beta","since":1760000000000,"until":1760000000200,"state":{"state":"ended","reason":{"why":"returned"}}}');
INSERT INTO record VALUES('lease/2','{"record":"lease","lease":2,"function":"alpha/nvme0","epoch":2,"borrower":"beta","since":1760000001000,"until":null,"state":{"state":"active","socket":"/run/rackbus/demo/beta/functions/nvme0.2.sock"}}');
INSERT INTO record VALUES('next-lease','{"record":"next_lease","lease":3}');
COMMIT;
PRAGMA user_version = 2;
