-------------------------------- MODULE Keys --------------------------------
(* One request, sent by several callers under one idempotency key, or by one *)
(* caller again and again because its replies get lost: statements of O1,    *)
(* O5 and O8.  The insert and the look that explains why it inserted nothing *)
(* are two statements, so everything may change between them; a look itself  *)
(* is one statement.  The strategy is reject.                                *)
EXTENDS Naturals, FiniteSets
CONSTANTS
  Callers,     \* each has a run id of its own
  Keyed,       \* the callers share one key; FALSE: no key, only run ids
  Fuel,        \* replies lost, callers or stores killed
  KeyUnique,   \* O5  the key is unique over (scope, key), and the scope is never null
  OwnFirst,    \* O1  the look asks for my id and my key before the incumbent
  CallersId,   \* O8  the run id comes from the caller; FALSE: drawn at each try
  OneExecutor, \* O5  only who was answered with its own run executes it
  AckAfter     \* I15 an admission is acknowledged when it is durable
VARIABLES row,     \* id -> none, active, ended
          durable, \* the same, as it would be found after a kill
          pc, id, answer, runs, fuel
vars == <<row, durable, pc, id, answer, runs, fuel>>
Nobody == 0
Ids == Callers \cup {c + 10 : c \in Callers}
Rows == {i \in Ids : row[i] # "none"}
Active == {i \in Ids : row[i] = "active"}
Init == /\ row = [i \in Ids |-> "none"] /\ durable = row /\ pc = [c \in Callers |-> "insert"]
        /\ id = [c \in Callers |-> c] /\ answer = [c \in Callers |-> <<"none", Nobody>>]
        /\ runs = {} /\ fuel = Fuel
Clash(c) == Active # {} \/ id[c] \in Rows \/ (Keyed /\ KeyUnique /\ Rows # {})
Insert(c) == /\ pc[c] = "insert"
             /\ IF Clash(c) THEN pc' = [pc EXCEPT ![c] = "look"] /\ UNCHANGED row
                ELSE pc' = [pc EXCEPT ![c] = "inserted"] /\ row' = [row EXCEPT ![id[c]] = "active"]
             /\ UNCHANGED <<durable, id, answer, runs, fuel>>
Say(c, what, i) == answer' = [answer EXCEPT ![c] = <<what, i>>] /\ pc' = [pc EXCEPT ![c] = "answered"]
\* group commit: what was inserted becomes durable a little later
Commit == durable # row /\ durable' = row /\ UNCHANGED <<row, pc, id, answer, runs, fuel>>
Acknowledge(c) == /\ pc[c] = "inserted" /\ (AckAfter => durable[id[c]] # "none")
                  /\ Say(c, "mine", id[c]) /\ UNCHANGED <<row, durable, id, runs, fuel>>
\* several rows of one request exist only where a mutation made them
Any(S) == CHOOSE i \in S : TRUE
\* what a look read is answered, too, when it is durable
Look(c) == /\ pc[c] = "look" /\ (AckAfter => durable = row)
           /\ LET mine == id[c] \in Rows  same == Keyed /\ Rows # {} IN
              CASE OwnFirst /\ mine -> Say(c, "mine", id[c])
                [] OwnFirst /\ same /\ ~mine -> Say(c, "reused", Any(Rows))
                [] ~(OwnFirst /\ (mine \/ same)) /\ Active # {} -> Say(c, "busy", Any(Active))
                [] ~OwnFirst /\ Active = {} /\ mine -> Say(c, "mine", id[c])
                [] ~OwnFirst /\ Active = {} /\ ~mine /\ same -> Say(c, "reused", Any(Rows))
                [] OTHER -> pc' = [pc EXCEPT ![c] = "insert"] /\ UNCHANGED answer
           /\ UNCHANGED <<row, durable, id, runs, fuel>>
\* the caller did not hear the answer, and asks again
Again(c) == /\ fuel > 0 /\ fuel' = fuel - 1 /\ pc[c] \in {"inserted", "look"} /\ pc' = [pc EXCEPT ![c] = "insert"]
            /\ id' = [id EXCEPT ![c] = IF CallersId THEN c ELSE c + 10] /\ UNCHANGED <<row, durable, answer, runs>>
Execute(c) == /\ pc[c] = "answered" /\ answer[c][1] \in (IF OneExecutor THEN {"mine"} ELSE {"mine", "reused"})
              /\ runs' = runs \cup {<<answer[c][2], c>>} /\ UNCHANGED <<row, durable, pc, id, answer, fuel>>
End(i) == row[i] = "active" /\ row' = [row EXCEPT ![i] = "ended"] /\ UNCHANGED <<durable, pc, id, answer, runs, fuel>>
\* everything is killed; callers that had no answer ask again
Kill == /\ fuel > 0 /\ fuel' = fuel - 1 /\ row' = durable
        /\ pc' = [c \in Callers |-> IF pc[c] = "answered" THEN "answered" ELSE "insert"]
        /\ UNCHANGED <<durable, id, answer, runs>>
Next == Commit \/ Kill \/ (\E i \in Ids : End(i))
        \/ \E c \in Callers : Insert(c) \/ Acknowledge(c) \/ Look(c) \/ Again(c) \/ Execute(c)
Spec == Init /\ [][Next]_vars
I1 == Cardinality(Active) <= 1
\* one key, or one caller who repeats itself: one run
I14 == Cardinality(Rows) <= IF Keyed THEN 1 ELSE Cardinality(Callers)
I14Chain == \A a, b \in runs : a[1] = b[1] => a = b
\* nobody is told that the thread is busy with the very run it asked for
I14Answer == \A c \in Callers : answer[c][1] = "busy" => ~Keyed /\ answer[c][2] \notin {c, c + 10}
I15 == \A c \in Callers : answer[c][1] = "mine" => row[answer[c][2]] # "none"
=============================================================================
