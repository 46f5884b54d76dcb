-- The table of a name: what it is, and what of it has to stay as it is in a target.
-- name: table
select
    classes.oid::bigint, spaces.nspname, classes.relname, classes.relkind::text, classes.relispartition,
    exists (select 1 from pg_inherits where classes.oid in (inhparent, inhrelid)), classes.relpersistence::text,
    pg_has_role(classes.relowner, 'usage'), pg_get_userbyid(classes.relowner), array_to_string(reloptions, ', ')
from pg_class as classes join pg_namespace as spaces on spaces.oid = classes.relnamespace
where classes.oid = to_regclass($1);

-- What follows a table, and not its name, although it is no part of the table: views, foreign keys of other tables,
-- functions with its row type, and columns that take numbers from its sequences. A part of a table depends on it, or on
-- another part, automatically or internally, perhaps besides other dependencies.
-- name: dependents
with recursive parts as (
    select 'pg_class'::regclass::oid as classid, $1::bigint::oid as objid
    union
    select depends.classid, depends.objid
    from pg_depend as depends join parts on depends.refclassid = parts.classid and depends.refobjid = parts.objid
    where depends.deptype in ('a', 'i')
)
select distinct pg_describe_object(
    case when rules.oid is null then others.classid else 'pg_class'::regclass end,
    coalesce(rules.ev_class, others.objid),
    case when rules.oid is null then others.objsubid else 0 end
)
from pg_depend as others
join parts on others.refclassid = parts.classid and others.refobjid = parts.objid
left join pg_rewrite as rules on others.classid = 'pg_rewrite'::regclass and rules.oid = others.objid
where (others.classid, others.objid) not in (select classid, objid from parts)
order by 1;

-- What `create table … (like …)` does not copy.
-- name: not_copied
select 'trigger ' || quote_ident(tgname) from pg_trigger where tgrelid = $1::bigint::oid and not tgisinternal
union all select 'rule ' || quote_ident(rulename) from pg_rewrite where ev_class = $1::bigint::oid
union all select 'policy ' || quote_ident(polname) from pg_policy where polrelid = $1::bigint::oid
union all select 'row level security' from pg_class where oid = $1::bigint::oid and relrowsecurity
union all select 'foreign key ' || quote_ident(conname) from pg_constraint
    where conrelid = $1::bigint::oid and contype = 'f'
union all select 'place in publication ' || quote_ident(pubname)
    from pg_publication_rel join pg_publication as publications on publications.oid = prpubid
    where prrelid = $1::bigint::oid
union all select 'replica identity' from pg_class where oid = $1::bigint::oid and relreplident != 'd'
union all select 'privileges on column ' || quote_ident(attname) from pg_attribute
    where attrelid = $1::bigint::oid and attacl is not null and not attisdropped
order by 1;

-- The privileges on a table, as statements that grant them on another one.
-- name: grants
select format(
    'grant %s on %s to %s%s', privilege_type, $2::text,
    case when grantee = 0 then 'public' else quote_ident(pg_get_userbyid(grantee)) end,
    case when is_grantable then ' with grant option' else '' end
)
from pg_class, aclexplode(relacl) where oid = $1::bigint::oid and grantee != relowner;

-- Privileges that others have on a table, and not on another one.
-- name: missing_grants
select case when grantee = 0 then 'public' else quote_ident(pg_get_userbyid(grantee)) end, lower(privilege_type)
from (
    select grantee, privilege_type from pg_class, aclexplode(relacl)
    where oid = $1::bigint::oid and grantee != relowner
    except select grantee, privilege_type from pg_class, aclexplode(relacl) where oid = $2::bigint::oid
) as missing
where grantee != (select relowner from pg_class where oid = $2::bigint::oid)
order by 1, 2;

-- name: is_analyzed
select last_analyze is not null or last_autoanalyze is not null from pg_stat_all_tables where relid = $1::bigint::oid;

-- name: live
select target from keywise_targets where name = $1 and is_live;

-- name: noted
select pipeline, generation from keywise_targets where name = $1 and target = $2;

-- name: note
insert into keywise_targets (name, target, pipeline, generation, is_live) values ($1, $2, $3, $4, false)
on conflict (name, target) do nothing;

-- The second of two rows that `exchange` writes; a target that keywise has not built is noted without a run.
-- name: set_live
insert into keywise_targets (name, target, pipeline, generation, is_live) values ($1, $2, null, null, $3)
on conflict (name, target) do update set is_live = excluded.is_live;

-- name: forget
delete from keywise_targets where name = $1 and target = $2;

-- name: built
select target from keywise_targets
where name = $1 and pipeline = $2 and (is_live or to_regclass(format('%I.%I', $3::text, target)) is not null)
order by id;
