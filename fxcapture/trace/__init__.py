"""How a run tells of its module calls: marks, the scope, and the values they carry."""
